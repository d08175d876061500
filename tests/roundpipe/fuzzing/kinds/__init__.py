"""What programs are made of: layers of rows, modules that are taken apart, inputs, outputs and labels."""
