//go:build !race

package badgersrc_test

// collects says that stores run the collector of the value log beside everything else.
const collects = true
