import js from "@eslint/js";
import globals from "globals";

export default [
  {
    ...js.configs.recommended,
    files: ["**/*.js"],
    languageOptions: { sourceType: "script", globals: globals.browser },
    rules: { ...js.configs.recommended.rules, eqeqeq: "error", "no-var": "error", "prefer-const": "error", "no-shadow": "error" },
  },
];
