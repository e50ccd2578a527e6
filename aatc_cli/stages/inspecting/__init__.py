"""What inspect shows, one file per kind of thing looked at."""
