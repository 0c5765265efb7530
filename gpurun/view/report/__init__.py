"""The report: several runs compared, as one self-contained HTML file."""
