"""Descriptions of an engine, its models and its work, which the driver hands to the workers."""
