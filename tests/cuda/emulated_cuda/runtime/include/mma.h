// The shim has these names.
