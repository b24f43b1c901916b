"""Worker processes on the nodes of a Ray cluster. Only `cluster` may be imported without Ray."""
