"""The Triton backend. Nothing here is imported before Triton is wanted."""
