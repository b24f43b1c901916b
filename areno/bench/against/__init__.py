"""The same work by other libraries."""
