"""Operations of a program changed one at a time: the program, the changes of each kind of operation, and the search."""
