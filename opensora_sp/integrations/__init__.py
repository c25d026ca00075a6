"""Models and samplers of this package under the interfaces of other libraries."""
