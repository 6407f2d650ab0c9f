"""Programs as `__model__` of Fluid: rules from recorded calls to Fluid's operators, and the messages that hold them."""
