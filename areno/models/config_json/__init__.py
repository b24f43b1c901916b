"""Reading config.json: fields with their types, those that change nothing, and rotary frequencies."""
