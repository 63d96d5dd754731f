"""One file per algorithm: its configuration and the function that builds its graph."""
