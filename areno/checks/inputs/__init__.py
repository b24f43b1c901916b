"""What checks read: rows beside what the run makes of them, answers as the template writes them, small models."""
