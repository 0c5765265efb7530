"""The report: what several runs did, laid over one another, as one HTML file that needs nothing but itself."""
