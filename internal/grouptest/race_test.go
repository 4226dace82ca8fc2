//go:build race

package grouptest

const raceDetector = true
