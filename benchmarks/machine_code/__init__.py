"""What a GPU would be given to run, read without one: launches, the code that they were compiled to, and its speed."""
