"""Where live prices come from: a module for each source, behind one small interface."""
