"""What training needs of memory, by formula: the shapes of models (`shapes`) and the estimate (`estimate`)."""
