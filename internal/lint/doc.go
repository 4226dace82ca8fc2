// Package lint holds the house rules of the project as tests, so that a rule which
// is broken fails the build instead of a review.
//
// It hides how the tree is read: every Go file is parsed once and one `go list`
// gives the import graph. Each rule is a function over that tree with a test of its
// own on a few lines of source that break it, and a test that holds the project to
// it. Directories that do not exist are not missed: the rules look at what is there.
package lint
