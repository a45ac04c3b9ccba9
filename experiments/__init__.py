"""Scripts that answer one question each; see README.md."""
