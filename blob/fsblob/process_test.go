package fsblob

const childEnv = "FSBLOB_TEST_CHILD"

func runChild(string) int { return 0 }
