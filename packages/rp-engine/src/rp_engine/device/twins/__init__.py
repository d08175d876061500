"""What is known of a layer's twin on a device."""
