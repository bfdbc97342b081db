"""One measured fine-tuning trial: what is asked, what happened, and the code that trains."""
