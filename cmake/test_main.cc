// The main function of every test program.
//
// Exit code 77 means that all cases were skipped; ctest shows the program as skipped then. A failure always wins, and a
// program that ran no case at all has failed.
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  if (result != 0 || testing::GTEST_FLAG(list_tests)) return result;
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  if (tests.test_to_run_count() == 0) {
    std::fprintf(stderr, "no test case was selected\n");
    return 1;
  }
  return tests.successful_test_count() == 0 ? 77 : 0;
}
