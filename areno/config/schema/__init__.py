"""What configuration dataclasses are made of: sections and settings, and how plain values become them."""
