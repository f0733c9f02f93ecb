"""Declaration and validation of the settings of all components, and the settings that all worker processes have in
common."""
