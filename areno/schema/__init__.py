"""How settings are declared (sections, fields, types, values), and how sections are built from mappings."""
