"""The engine: worker processes that decode and train, and the classes with which the driver process controls them."""
