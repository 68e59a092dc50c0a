"""What is made of the rows: comparisons, plots, the tables of the documents."""
