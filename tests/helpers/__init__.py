"""What the tests import; no tests in here."""
