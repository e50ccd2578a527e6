"""Parts of collect: the statistics being gathered, its passes over text, its processes."""
