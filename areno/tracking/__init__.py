"""What a run records: its trackers, log, folder and samples, and the reader of a run's folder."""
