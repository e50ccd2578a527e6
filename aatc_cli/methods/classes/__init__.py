"""Classes of tokens: how tokens are told apart, one way in each file."""
