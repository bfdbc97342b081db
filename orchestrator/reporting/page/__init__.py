"""Tables behind the charts of the HTML report."""
