"""Private torch names, one file a concern; no other package imports one."""
