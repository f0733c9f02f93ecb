"""Names of fields in errors, fields that are refused, and fields that give the output a form."""
