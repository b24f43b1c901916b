"""What models take on the devices of a layout, which layouts fit, and what a step may keep."""
