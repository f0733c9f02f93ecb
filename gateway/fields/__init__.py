"""Fields of request bodies: their names in errors, fields that are not supported, and fields that constrain the form of
the output."""
