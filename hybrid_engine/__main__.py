"""`python -m hybrid_engine`."""

from hybrid_engine.cli import app

if __name__ == "__main__":
    app()
