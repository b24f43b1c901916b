"""How settings are declared: sections and their fields, types and values, and sections built from mappings."""
