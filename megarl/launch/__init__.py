"""Where the actors go, and a run from start to end."""
