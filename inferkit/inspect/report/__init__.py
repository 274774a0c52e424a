"""The verb `report`: one HTML file of a run or a sweep."""
