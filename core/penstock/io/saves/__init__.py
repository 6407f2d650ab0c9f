"""Saves: a manifest (JSON) beside a safetensors file and, where a Program belongs to it, the Program's text."""
