"""Files that are downloaded during a run or on request, beside the collect step."""
