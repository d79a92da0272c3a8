// Has the precompiled headers of the tests: quire_test_headers in QuireTargets.cmake.
int main() {}
