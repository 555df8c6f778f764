"""Where programs that a model wrote are run: isolated, limited, and never believed."""
