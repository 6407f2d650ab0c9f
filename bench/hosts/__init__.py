"""Hosts on one machine: network namespaces joined by links of a chosen rate and delay, and what is measured on them."""
