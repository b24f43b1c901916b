"""What a run records: trackers, its log, its folder, and the reader of finished runs."""
