"""Worker processes: how they start, join process groups, receive commands and end."""
