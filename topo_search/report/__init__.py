"""What people read: drawings and tables for the terminal."""
