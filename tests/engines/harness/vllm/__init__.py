"""Stand-in for a package that SGLang imports one function of; see the folder's README."""
