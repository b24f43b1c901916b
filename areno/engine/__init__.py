"""The engine: worker processes that decode and train, and the driver's side of them."""
