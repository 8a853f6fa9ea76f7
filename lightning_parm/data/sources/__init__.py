"""Where tokens come from: one file a format."""
