"""How settings are declared: sections and their fields, the values that they take, and sections made of mappings."""
